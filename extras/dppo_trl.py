"""DPPO for TRL 1.16: GRPOTrainer with a pruning rule of dppo.py.

TRL shards models over several GPUs and generates with vLLM; rollout and loss stay its own. Use the
trainer as GRPOTrainer, in a file in the folder of dppo.py, started by `python` or `accelerate
launch` (pip install trl==1.16.0):

    from extras.dppo_trl import DPPOTrainer
    from trl import GRPOConfig

    pruning = {"method": "dppo", "prompt_prune_rate": 0.7, "completion_prune_rate": 0.7}
    trainer = DPPOTrainer(
        model=..., args=GRPOConfig(...), train_dataset=..., reward_funcs=..., pruning=pruning
    )
    trainer.train()

The method may also be a rule of your own, or "extras.proportional:Proportional". The expected
gradient is that of TRL's loss on the whole window, as long as `entropy_coef` and
`top_entropy_quantile` are left alone. Five things differ from dppo.py:

1. A step fills TRL's batch, whatever a rollout is worth. So there is less noise, not fewer
   rollouts. The worth is logged as `rollout_worth`.
2. The memory is one batch older, since the data loader fetches ahead.
3. An epoch's last window may reach into the next epoch.
4. TRL pads, and does not pack.
5. A run that is resumed starts without memory, and with an order of its own.

It ran on CPUs only, in one process and in two.

N  prompts of a window                  B  prompts of a batch, as TRL has them
K  prompts kept of it, at most B        R  rows of a process: its share of the B G completions
G  completions of a prompt              m  mean length of completions in earlier batches
"""

import math

import torch
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from dppo import Config, prune_completions, prune_prompts


class WindowSampler(RepeatSampler):
    """The prompts kept of each window, in the rows that TRL expects. The data loader is one batch
    ahead, so what they weigh waits in a queue. All processes draw the same, since they have the
    same seed and history."""

    def __init__(self, trainer, rule):
        G, B = rule.config.group_size, rule.config.prompts_per_step
        args = trainer.args
        super().__init__(trainer.train_dataset, G, B, args.steps_per_generation, seed=args.seed)
        self.trainer = trainer
        self.rule = rule
        self.order = torch.arange(0)  # prompts to come

    def __iter__(self):
        # By the step, or a run that is resumed would look at its first prompts again.
        self.generator.manual_seed(self.trainer.args.seed + self.trainer.state.global_step)
        self.queue = []
        for _ in range(self.num_samples // self.batch_size):
            if len(self.order) < self.num_samples:
                epoch = torch.randperm(self.num_samples, generator=self.generator)
                self.order = torch.cat([self.order, epoch])
            upcoming = self.order[: self.num_samples]
            self.worth = self.batch_size / self.rule.limit_of_step(upcoming)
            window = prune_prompts(self.rule, upcoming, self.batch_size, self.generator)
            self.queue.append(window)
            N, prompts, _ = window  # a number, (K,), (K,) weights
            self.order = self.order[N:]
            # TRL needs B prompts. One prompt, with weight 0, fills the batch.
            filling = upcoming[:1].expand(self.batch_size - len(prompts))
            batch = torch.cat([prompts, filling])  # (B,)
            rows = batch.repeat_interleave(self.mini_repeat_count)  # (B G,)
            yield from rows.repeat(self.repeat_count).tolist()


class DPPOTrainer(GRPOTrainer):
    """GRPOTrainer with a rule; `pruning` has settings of dppo.Config. Its expected gradient is
    GRPO's on the whole window."""

    def __init__(self, *args, pruning=None, **kwargs):
        super().__init__(*args, **kwargs)
        group = self.multi_objective_aggregation == "sum_then_normalize"
        group = group and self.scale_rewards != "batch"
        loss = self.loss_type in ("grpo", "dr_grpo", "dapo")
        if not (group and loss and self.beta == 0 and self.num_iterations == 1):
            needs = "loss_type grpo, dr_grpo or dapo, beta 0, num_iterations 1"
            raise ValueError(f"needs {needs}, rewards scaled by group")
        G = self.num_generations
        settings = {"group_size": G, "prompts_per_step": self.args.generation_batch_size // G}
        # The rule asks whether advantages are divided by the standard deviation.
        settings["objective"] = "dr_grpo" if self.scale_rewards == "none" else "grpo"
        config = Config(**settings, **pruning or {})
        self.windows = WindowSampler(self, config.rule_class(config, len(self.train_dataset)))
        # A resumed run would skip batches, and leave their weights in the queue.
        self.args.ignore_data_skip = True

    def _get_train_sampler(self, dataset=None):
        return self.windows

    def _calculate_rewards(self, *args):
        self.rewards = super()._calculate_rewards(*args)  # (B G, reward functions)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)  # R rows
        if not self.model.training:
            return batch
        # 1. What was drawn of the window, and its rollout in all processes.
        N, prompts, w_q = self.windows.queue.pop(0)
        rewards, advantages, lengths = self.rollout_of(prompts, batch)  # (K, G) each
        # 2. Prune completions. Remember.
        rule = self.windows.rule
        w_qi = prune_completions(rule, advantages, w_q, self.windows.generator)
        w = rule.weights(w_q, w_qi, N)  # (K, G)
        rule.remember(prompts, rewards, advantages)
        total = N * self.num_generations
        self._metrics["train"]["prompts_seen"].append(N)
        self._metrics["train"]["rollout_worth"].append(self.windows.worth)
        length = (w_q @ lengths.mean(dim=1) / w_q.sum()).item()  # of the window, estimated
        m = rule.memory["mean_length"].item() or length  # of earlier batches
        rule.memory["mean_length"].fill_(0.9 * m + 0.1 * length)
        # 3. All processes must train the same number of rows, a multiple of TRL's batches.
        processes = self.accelerator.num_processes
        batches = self.args.steps_per_generation
        filling = processes * len(inputs) - w.numel()
        w = torch.nn.functional.pad(w.flatten(), (0, filling)).view(processes, -1)
        most = int((w > 0).sum(dim=1).max())
        count = math.ceil(max(1, most) / batches) * batches
        w = w[self.accelerator.process_index].to(batch["advantages"])  # (R,)
        rows = (w == 0).int().argsort(stable=True)[:count]  # those kept, then some of weight 0
        # 4. TRL divides by a process's rows, or by all tokens (dapo). In their place come N G, or
        #    N G m.
        batch["num_items_in_batch"] = torch.tensor(total * m, device=rows.device)
        scale = 1 if self.loss_type == "dapo" else processes * count / total
        batch["advantages"] *= w * scale
        for name, value in batch.items():
            if torch.is_tensor(value) and value.dim() > 0:
                batch[name] = value[rows]
        return batch

    def rollout_of(self, prompts, batch):
        """(K, G) rewards, advantages and lengths, without the rows that only fill the batch."""
        rewards = self.rewards.nan_to_num() @ self.reward_weights.to(self.rewards)  # (B G,)
        lengths = batch["completion_mask"].sum(dim=1)  # (R,)
        advantages, lengths = self.accelerator.gather((batch["advantages"], lengths))  # (B G,)
        rows = torch.stack([rewards.double(), advantages.double(), lengths.double()])  # (3, B G)
        return rows.cpu().view(3, -1, self.num_generations)[:, : len(prompts)]
