"""DPPO for TRL 1.16: GRPOTrainer with a pruning rule of dppo.py.

TRL shards models over several GPUs and generates with vLLM. Its rollout and the code of its loss
stay as they are; advantages, rows and the divisor change. To use the trainer, put a script like
this beside dppo.py and start it with `python` or `accelerate launch` (pip install trl==1.16.0):

    from extras.dppo_trl import DPPOTrainer
    from trl import GRPOConfig

    pruning = {"method": "dppo", "prompt_prune_rate": 0.7, "completion_prune_rate": 0.7}
    args = GRPOConfig("runs/trl", num_generations=8)  # on a CPU also use_cpu=True, bf16=False
    trainer = DPPOTrainer(
        model=..., args=args, train_dataset=..., reward_funcs=..., pruning=pruning
    )
    trainer.train()

The method may also be "extras.proportional:Proportional" or a rule of your own. With
loss_type grpo or dr_grpo, the expected gradient is the gradient of TRL's loss on all candidates, as
long as `entropy_coef` and `top_entropy_quantile` keep their defaults. With dapo, which is TRL's
default, the loss is divided by the number of all completions times max_completion_length, and not
by the number of their tokens, which depends on the draw. So gradients are those of GRPOTrainer
times the mean length over max_completion_length. Eight things differ from dppo.py:

1. A step always fills TRL's batch, even if the rule would need fewer prompts. So a rule like
   Proportional reduces the noise, not the number of rollouts. The log's `rollout_worth` is the
   batch's number of prompts, divided by the number that the rule would need. And TRL's `epoch`
   counts batches, so with pruning, an epoch has as many rollouts as without, and each prompt is a
   candidate more often: some 14 times in 6 epochs, if 0.43 of the candidates are kept. The log's
   `passes` gives this number.
2. The memory is one batch older, because the data loader fetches a batch ahead.
3. The candidates of a batch are at most as many as the prompts of the dataset.
4. TRL pads sequences and does not pack them.
5. A resumed run starts without memory, and visits the prompts in another order.
6. In the log, `reward`, `reward_std`, `frac_reward_zero_std` and `rewards/...` are estimates for
   all candidates: a kept prompt counts 1/pi times, and a missing reward does not count. Groups with
   fewer than two rewards have no standard deviation, so `frac_reward_zero_std` leaves them out. All
   other metrics, such as the lengths, are TRL's own, and describe all rows of its batch.
7. A mixture of experts needs `router_aux_loss_coef=0`, because TRL's auxiliary loss for the router
   is a mean over the rows that are trained, and would be biased.
8. A rule gets a Rollout without texts, and with log-probabilities only if TRL has them from
   sampling, as with vLLM. Without them, Proportional keeps completions by w_q |A|/Z.

So far it has run on CPUs only, in one process and in two.

N  number of candidates                 B  prompts of TRL's batch, which is the limit
K  prompts kept of them, at most B      R  rows of a process: its share of the B G completions
G  completions of a prompt
"""

import math

import torch
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from dppo import RULES, Config, Rollout, Rule, Sequence, copied, find, group_advantages, require


class PruningSampler(RepeatSampler):
    """The kept prompts of each batch, in the rows that TRL expects. Because the data loader is one
    batch ahead, their weights wait in a queue. All processes draw the same prompts, since they have
    the same seed and memory."""

    def __init__(self, trainer, rule):
        G, B = rule.config.group_size, rule.config.prompts_per_step
        args = trainer.args
        super().__init__(trainer.train_dataset, G, B, args.steps_per_generation, seed=args.seed)
        self.trainer = trainer
        self.rule = rule
        self.order = torch.arange(0)  # prompts to come
        # The limit is B, whatever the rule wants, because TRL generates for B prompts anyway.
        self.wanted = rule.limit_of_step
        rule.limit_of_step = lambda upcoming: B

    def __iter__(self):
        # The seed depends on the step, or a resumed run would visit its first prompts again.
        self.generator.manual_seed(self.trainer.args.seed + self.trainer.state.global_step)
        self.queue = []
        for _ in range(self.num_samples // self.batch_size):
            if len(self.order) < self.num_samples:
                epoch = torch.randperm(self.num_samples, generator=self.generator)
                self.order = torch.cat([self.order, epoch])
            upcoming = self.order[: self.num_samples]
            worth = self.batch_size / self.wanted(upcoming.clone())
            N, prompts, w_q = self.rule.prune_prompts(upcoming, self.generator)  # (K,) each
            self.queue.append((N, prompts, w_q, worth))
            self.order = self.order[N:]
            # TRL needs B prompts, so copies of one prompt, with weight 0, fill the batch.
            filling = upcoming[:1].expand(self.batch_size - len(prompts))
            batch = torch.cat([prompts, filling])  # (B,)
            rows = batch.repeat_interleave(self.mini_repeat_count)  # (B G,)
            yield from rows.repeat(self.repeat_count).tolist()


def mean_and_std(values, w_q):
    """(K, G) or (K, 1) values, NaN where missing; (K,) w_q -> their mean and standard deviation for
    all candidates, estimated by counting a kept prompt w_q times. NaN if there are no values."""
    w = w_q[:, None] * ~values.isnan()
    mean = (w * values).nansum() / w.sum()
    squares = (w * (values - mean).square()).nansum()
    variance = squares / (w.sum() - 1).clamp(min=0)
    return mean.item(), variance.sqrt().item()


class DPPOTrainer(GRPOTrainer):
    """GRPOTrainer with a rule; `pruning` has settings of dppo.Config. The expected gradient is that
    of GRPO on all candidates."""

    def __init__(self, *args, pruning=None, **kwargs):
        super().__init__(*args, **kwargs)
        group = self.multi_objective_aggregation == "sum_then_normalize"
        group = group and self.scale_rewards != "batch"
        loss = self.loss_type in ("grpo", "dr_grpo", "dapo")
        is_fine = group and loss and self.beta == 0 and self.num_iterations == 1
        needs = "loss_type grpo, dr_grpo or dapo, beta 0, num_iterations 1, scale_rewards not batch"
        require(is_fine, f"needs {needs}")
        told = "needs router_aux_loss_coef 0, because 1/pi does not weight the router's loss"
        require(not self.aux_loss_enabled, told)
        require(self.args.shuffle_dataset, "needs shuffle_dataset, as each pass is shuffled anew")
        G = self.num_generations
        settings = {"group_size": G, "prompts_per_step": self.args.generation_batch_size // G}
        # The rule asks whether A is divided by the std, and the loss by each completion's length.
        objective = "grpo" if self.loss_type == "grpo" else "dapo"
        settings["objective"] = "dr_grpo" if self.scale_rewards == "none" else objective
        pruning = pruning or {}
        rule_class = find("method", pruning.get("method", "dppo"), RULES)
        has_usual_step = rule_class.step is Rule.step
        require(has_usual_step, f"{rule_class.__name__} overrides step(), which TRL never calls")
        config = Config(**settings, **rule_class.defaults | pruning)
        self.sampler = PruningSampler(self, rule_class(config, self.train_dataset))
        self.candidates = 0  # so far
        # Otherwise a resumed run would skip batches, and leave their weights in the queue.
        self.args.ignore_data_skip = True

    def _get_train_sampler(self, dataset=None):
        return self.sampler

    def _calculate_rewards(self, *args):
        self.rewards = super()._calculate_rewards(*args)  # (B G, reward functions)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)  # R rows
        if not self.model.training:
            return batch

        # 1. The kept prompts and their rollout, from all processes.
        N, prompts, w_q, worth = self.sampler.queue.pop(0)
        by_function, rewards, sequences, lengths = self.graded(prompts, batch)
        A = group_advantages(rewards, scale_by_std=self.scale_rewards != "none")  # (K, G)

        # 2. Prune completions.
        rule = self.sampler.rule
        rollout = Rollout(N, prompts, w_q, sequences, rewards, lengths, A, seconds=math.nan)
        w_qi = rule.prune_completions(copied(rollout), self.sampler.generator)
        w = w_q[:, None] * w_qi  # (K, G)

        # 3. All processes must train the same number of rows, a multiple of steps_per_generation.
        processes = self.accelerator.num_processes
        batches = self.args.steps_per_generation
        filling = processes * len(inputs) - w.numel()
        both = torch.stack([w, A]).flatten(1)  # (2, K G)
        w_of, A_of = torch.nn.functional.pad(both, (0, filling)).view(2, processes, -1)
        most = int((w_of > 0).sum(dim=1).max())
        count = math.ceil(max(1, most) / batches) * batches
        w_of, A_of = w_of[self.accelerator.process_index], A_of[self.accelerator.process_index]
        rows = (w_of == 0).int().argsort(stable=True)[:count]  # those kept, then some of weight 0

        # 4. TRL divides by a process's rows or, with dapo, by the number of all tokens. Instead we
        #    divide by N G or, with dapo, by N G max_completion_length, which no draw changes.
        total = N * self.num_generations
        scale = 1 if self.loss_type == "dapo" else processes * count / total
        batch["advantages"] = (scale * w_of * A_of).to(batch["advantages"])
        divisor = torch.tensor(total * self.args.max_completion_length)
        batch["num_items_in_batch"] = divisor.to(batch["advantages"])
        rows = rows.to(batch["advantages"].device)
        for name, value in batch.items():
            if torch.is_tensor(value) and value.dim() > 0:
                batch[name] = value[rows]

        # 5. Log, and remember.
        self.candidates += N
        self._metrics["train"]["candidates"].append(N)
        self._metrics["train"]["passes"].append(self.candidates / len(self.train_dataset))
        self._metrics["train"]["rollout_worth"].append(worth)
        self.log_rewards(by_function, rewards, A, w_q)
        rule.remember(rollout)
        return batch

    def graded(self, prompts, batch):
        """(K, G, reward functions) rewards; (K, G) their weighted sum, NaN where no function gave a
        reward; K G sequences with log-probabilities at most; (K, G) numbers of trained tokens. Rows
        that only fill the batch are left out."""
        K, G = len(prompts), self.num_generations
        by_function = self.rewards.cpu().double().view(-1, G, len(self.reward_funcs))[:K]
        rewards = (by_function * self.reward_weights.cpu()).nansum(dim=2)
        rewards[by_function.isnan().all(dim=2)] = math.nan
        is_trained = self.of_all(batch["completion_mask"] * batch.get("tool_mask", 1))
        sequences = []
        if "sampling_per_token_logps" in batch:
            logprobs = self.of_all(batch["sampling_per_token_logps"])
            for row, those in zip(logprobs[: K * G], is_trained.bool()):
                sequences.append(Sequence(None, None, row[those].nan_to_num(0.0)))
        return by_function, rewards, sequences, is_trained.sum(dim=1).double().view(-1, G)[:K]

    def of_all(self, rows):
        """(R, tokens) rows -> (B G, tokens) those of all processes, on the CPU."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(rows, dim=1)).cpu()

    def log_rewards(self, by_function, rewards, A, w_q):
        """Replaces what TRL has just logged about its rows with estimates for all candidates."""
        log = self._metrics["train"]
        for name, values in zip(self.reward_func_names, by_function.unbind(dim=2)):
            mean, std = mean_and_std(values, w_q)
            log[f"rewards/{name}/mean"][-1] = mean
            log[f"rewards/{name}/std"][-1] = std
        mean, std = mean_and_std(rewards, w_q)
        log["reward"][-1] = mean
        log["reward_std"][-1] = std
        is_equal = (A == 0).all(dim=1, keepdim=True).double()  # (K, 1)
        is_equal[(~rewards.isnan()).sum(dim=1) < 2] = math.nan
        log["frac_reward_zero_std"][-1], _ = mean_and_std(is_equal, w_q)
