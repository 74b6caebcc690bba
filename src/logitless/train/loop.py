"""The loop: who waits for whom, and nothing else.

    weights ──> Engine ──> Collector ──> Learner ──> Journal
       ^        sample     judge,        score,      metrics,
       │                   refill        step        rollouts
       └────────────────── hand over <─────┘

The engine gets the weights when a run begins (after a warm start and on resume too) and whenever a block has been
trained on, before anything is sampled with them, held-out prompts included. Everything happens in turn: the collector
waits for the learner's weights, the learner for the collector's block. A run that is stopped anywhere goes on bitwise,
because all that is random follows from the seed and the numbers that a checkpoint holds.

With several ranks each runs this loop. They share the prompts of a round and the rows of a pass; what comes of it every
rank has whole, and so every rank plans, weighs and decides alike. The first one writes.
"""

from contextlib import nullcontext

from transformers import PreTrainedTokenizerBase

from logitless.errors import TrainingError
from logitless.train.block import AdvantagedBlock, pack_groups
from logitless.train.block_metrics import (
    advantage_metrics,
    advantages_of,
    block_metrics,
    scoring_metrics,
    value_metrics,
)
from logitless.train.checkpoint import Checkpoint, checkpoints
from logitless.train.collector import Collector
from logitless.train.config import Recipe
from logitless.train.engines import Engines
from logitless.train.evaluate import Evaluation
from logitless.train.interrupt import Interrupt
from logitless.train.journal import Journal
from logitless.train.learner import Learner
from logitless.train.metrics import Numbers
from logitless.train.saving import restore_run, save_run


class Loop:
    """One run, from its first rollout to its last checkpoint.

    Args:
        recipe: checked.
        collector: draws blocks.
        learner: trains on them.
        evaluation: of held-out prompts.
        journal: is told everything.
        tokenizer: saved beside the weights.
    """

    def __init__(
        self,
        recipe: Recipe,
        collector: Collector,
        learner: Learner,
        evaluation: Evaluation,
        journal: Journal,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        self.collector, self.learner, self.evaluation, self.journal = collector, learner, evaluation, journal
        self.engines = Engines(collector.engine, evaluation.engine)
        self.block_metrics: Numbers = {}
        self.without_signal_in_a_row = 0
        self.ranks = learner.ranks
        self.interrupt = Interrupt(journal.message)

    def run(self) -> bool:
        """Train to the end, or to Ctrl-C; returns whether the run is complete. Either way a checkpoint is saved."""
        with self.interrupt.heard():
            self._hand_over()
            if self.ranks.of_first(not checkpoints(self.journal.folder.checkpoints)):
                self.journal.write({"step": 0, "block": 1, "epoch": 1, **self._evaluated("accuracy_before")})
                self.save()
            while self._done < self.recipe.train.blocks and not self._stopping():
                self._block()
                if self._stopping() or self._done % self.recipe.checkpoint.every_blocks == 0:
                    self.save()
            self.save()
        return self._done == self.recipe.train.blocks

    @property
    def _done(self) -> int:
        """Blocks finished."""
        return self.learner.progress.block

    def _stopping(self) -> bool:
        """Whether Ctrl-C was heard on any rank; all of them ask at the same places."""
        return self.ranks.any(self.interrupt.requested)

    def _block(self) -> None:
        """Collect a block unless one is in training, and train on it until its end or Ctrl-C."""
        if not self.learner.in_training and not self._collected():
            return
        while self.learner.in_training and not self._stopping():
            with self.journal.phase("training") as seconds:
                record = self.learner.step()
            record["time/training_seconds"] = seconds[0]
            record["throughput/training_tokens_per_second"] = record["optimizer/tokens"] / seconds[0]
            record |= self.block_metrics
            self.block_metrics = {}
            if not self.learner.in_training:
                self._hand_over()
                record |= self._evaluated_if_due()
            several = self.ranks.world > 1
            self.journal.write(record, {"parallel/tokens_per_rank": self.learner.tokens_per_rank} if several else {})
            if message := self.learner.check_skipped():
                self.journal.message(message)

    def _collected(self) -> bool:
        """Whether there is a block to train on; what Ctrl-C interrupts here is given up without a trace.

        With several ranks nothing is interrupted here: one that left would leave the others waiting.
        """
        before = self.collector.state_dict()
        try:
            with self.interrupt.at_once() if self.ranks.world == 1 else nullcontext():
                block = self._prepared()
        except KeyboardInterrupt:
            self.collector.load_state_dict(before)
            return False
        if block is None:
            self._pass_over()
            return False
        self.without_signal_in_a_row = 0
        self.learner.begin(block)
        return True

    def _prepared(self) -> AdvantagedBlock | None:
        """The next block, drawn and judged, packed, scored and with advantages; None without a token to train on."""
        number, journal = self._done + 1, self.journal
        with journal.phase("rollout") as seconds:
            judged = self.collector.next(self._done, length_factor=self.learner.controllers.length_factor)
        self.block_metrics = block_metrics(judged, seconds=seconds[0])
        journal.summary.setdefault("reward_first_block", self.block_metrics["reward/mean"])
        journal.summary["reward_last_block"] = self.block_metrics["reward/mean"]
        packed = pack_groups(judged.trained)
        if not packed.packed.num_tokens:
            journal.write_rollouts(number, judged)
            return None
        with journal.phase("scoring") as seconds:
            scored = self.learner.score(packed)
        self.block_metrics |= scoring_metrics(scored, seconds=seconds[0])
        block = self.learner.with_advantages(scored, judged.trained)
        advantages = advantages_of(block, judged)
        self.block_metrics |= advantage_metrics(advantages, self.learner.algorithm.advantage) | value_metrics(block)
        journal.write_rollouts(number, judged, advantages)
        return block

    def _pass_over(self) -> None:
        """Write the metrics of a block with nothing to train on; too many in a row end the run."""
        limit = self.recipe.train.max_blocks_without_signal
        place: Numbers = {"step": self.learner.progress.step, "block": self._done + 1, "epoch": 1}
        self.learner.end_block()
        self.journal.write({**place, **self.block_metrics, **self._evaluated_if_due()})
        self.journal.message(f"block {self._done}: no group with a signal, no step taken")
        self.block_metrics = {}
        self.without_signal_in_a_row += 1
        if self.without_signal_in_a_row >= limit:
            raise TrainingError(
                needed="completions of a prompt that differ in reward",
                given=f"none in {limit} blocks (train.max_blocks_without_signal)",
                remedy="Choose an easier task, warm-start the policy, raise the temperature or the group size.",
            )

    def _hand_over(self) -> None:
        """Every engine gets the weights as they are now."""
        with self.journal.phase("weights"):
            self.engines.load_all(self.learner.weights(), self.learner.version)

    def _evaluated_if_due(self) -> Numbers:
        """Held-out metrics at the end of the block just finished, where they are asked for."""
        due = self._done % self.recipe.evaluation.every_blocks == 0 or self._done == self.recipe.train.blocks
        return self._evaluated("accuracy_after") if due else {}

    def _evaluated(self, called: str) -> Numbers:
        """Held-out metrics, which also enter the summary as ``called``; none without held-out prompts."""
        if not self.evaluation.prompts:
            return {}
        with self.journal.phase("evaluation") as seconds:
            found = self.evaluation()
        self.journal.summary[called] = found["evaluation/accuracy"]
        return found | {"time/evaluation_seconds": seconds[0]}

    def save(self) -> None:
        """A checkpoint of everything."""
        if not self.ranks.is_first:
            return
        remembered = {"block_metrics": self.block_metrics, "without_signal_in_a_row": self.without_signal_in_a_row}
        with self.journal.phase("checkpoint"):
            keep = self.recipe.checkpoint.keep
            save_run(self.collector, self.learner, self.journal, self.tokenizer, remembered, keep=keep)

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint whose weights the policy already has."""
        remembered = restore_run(self.collector, self.learner, self.journal, saved)
        self.block_metrics = dict(remembered["block_metrics"])
        self.without_signal_in_a_row = remembered["without_signal_in_a_row"]
