"""What is counted over calls, as OpenTelemetry metrics. Needs the API only; without a provider a call costs nothing.

A round costs the engine's thread one list entry. Every `FLUSH_ROUNDS` rounds, and when the call ends, rounds become
sums of integers by arm, which observable counters report when somebody reads them; only the duration of a round is
recorded one by one, since the API takes a histogram's values in no other way. Names are OpenTelemetry's GenAI ones
where it has any, and vLLM's ``spec_decode`` scheme by drafter where not. No attribute holds text of a call.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from opentelemetry import metrics
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

from metasd_langchain._version import __version__
from metasd_langchain.values import RoundRecord, Summary

__all__ = ["FLUSH_ROUNDS", "CallMetrics", "use"]

FLUSH_ROUNDS = 64
OTHER = "other"  # what stands for the names that come after the most we keep apart
_MOST_STEPS = 32
_MOST_ARMS = 500  # of all operations, models and steps
_MOST_VALUES = 64  # calls' (model, step) pairs whose arm values are shown

# the conventions' own buckets
_CALL_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = tuple(4**power for power in range(14))
# ours
_ROUND_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 0.8, 1.6, 3.2)
_LENGTHS = (1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 17)

Labels = dict[str, str | int]


class _ArmKey(NamedTuple):
    operation: str
    model: str
    step: str
    arm: str


class _Arm:
    """Sums of the rounds an arm played."""

    __slots__ = ("accepted_lengths", "drafted", "labels", "pooled")

    def __init__(self, key: _ArmKey) -> None:
        self.pooled: Labels = {**_labels(key.operation, key.model), "metasd.drafter.name": key.arm}
        self.labels: Labels = {**self.pooled, "metasd.step": key.step} if key.step else self.pooled
        self.drafted = 0
        self.accepted_lengths: dict[int, int] = {}  # accepted tokens of a round -> rounds


class Instruments:
    """The instruments of one meter provider, and the sums behind those that are read.

    Args:
        meter: where they are made.
    """

    def __init__(self, meter: Meter) -> None:
        self._lock = threading.Lock()
        self._arms: dict[_ArmKey, _Arm] = {}
        self._steps: set[str] = set()
        self._values: OrderedDict[tuple[str, str, str], tuple[Labels, Mapping[str, float]]] = OrderedDict()
        histogram, counter = meter.create_histogram, meter.create_observable_counter
        self.duration = histogram(
            "gen_ai.client.operation.duration",
            "s",
            "A call, from its start to its last token; queueing and a first call's loading included.",
            explicit_bucket_boundaries_advisory=_CALL_S,
        )
        self.first_chunk = histogram(
            "gen_ai.client.operation.time_to_first_chunk",
            "s",
            "From submission of a streamed call to its first token.",
            explicit_bucket_boundaries_advisory=_CALL_S,
        )
        self.usage = histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens of a prompt or of an answer.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )
        self.active = meter.create_up_down_counter(
            "metasd.requests.active", "{request}", "Calls that wait or run, those of loading models included."
        )
        self.round_duration = histogram(
            "metasd.spec_decode.round.duration",
            "s",
            "A round, from its draft to its committed tokens. Without a call's first one, which reads the prompt.",
            explicit_bucket_boundaries_advisory=_ROUND_S,
        )
        self.accepted_length = histogram(
            "metasd.spec_decode.accepted_length",
            "{token}",
            "Mean tokens a round of a drafter in one call: 1 + accepted / rounds.",
            explicit_bucket_boundaries_advisory=_LENGTHS,
        )
        counter("metasd.spec_decode.rounds", [self._rounds], "{round}", "Forwards of the target that committed tokens.")
        counter("metasd.spec_decode.draft_tokens", [self._draft_tokens], "{token}", "Tokens drafted.")
        counter("metasd.spec_decode.accepted_tokens", [self._accepted_tokens], "{token}", "Drafted tokens accepted.")
        counter(
            "metasd.spec_decode.accepted_tokens_per_position",
            [self._accepted_tokens_per_position],
            "{token}",
            "Drafted tokens accepted at each position of a draft, from 0.",
        )
        meter.create_observable_gauge(
            "metasd.bandit.arm.value",
            [self._arm_values],
            "{reward}",
            "The policy's value of each arm when a step's last call ended, in the reward's units.",
        )

    # -- what calls add ---------------------------------------------------------------------------------------------

    def step(self, name: str) -> str:
        """A step's name as a label: steps beyond the first few share one, so that series stay few."""
        with self._lock:
            if name and name not in self._steps:
                if len(self._steps) >= _MOST_STEPS:
                    return OTHER
                self._steps.add(name)
            return name

    def arm(self, operation: str, model: str, step: str, name: str) -> _Arm:
        """Sums of an arm; those of arms beyond the first few hundred are one."""
        key = _ArmKey(operation, model, step, name)
        with self._lock:
            if key not in self._arms and len(self._arms) >= _MOST_ARMS:
                key = _ArmKey(operation, model, "", OTHER)
            return self._arms.setdefault(key, _Arm(key))

    def add(self, arm: _Arm, drafted: int, accepted_lengths: Mapping[int, int]) -> None:
        """Add rounds of an arm to its sums."""
        with self._lock:
            arm.drafted += drafted
            for length, rounds in accepted_lengths.items():
                arm.accepted_lengths[length] = arm.accepted_lengths.get(length, 0) + rounds

    def note_values(self, operation: str, model: str, step: str, policy: str, values: Mapping[str, float]) -> None:
        """Show what a policy thinks of its arms now."""
        labels: Labels = {**_labels(operation, model), "metasd.bandit.policy": policy}
        if step:
            labels["metasd.step"] = step
        finite = {arm: value for arm, value in values.items() if math.isfinite(value)}  # an untried arm may be inf
        with self._lock:
            self._values[model, step, policy] = labels, finite
            self._values.move_to_end((model, step, policy))
            while len(self._values) > _MOST_VALUES:
                self._values.popitem(last=False)

    # -- what readers ask; on their threads ---------------------------------------------------------------------------

    def _snapshot(self) -> list[tuple[_Arm, int, dict[int, int]]]:
        with self._lock:
            return [(arm, arm.drafted, dict(arm.accepted_lengths)) for arm in self._arms.values()]

    def _rounds(self, options: CallbackOptions) -> Iterator[Observation]:
        for arm, _, lengths in self._snapshot():
            yield Observation(sum(lengths.values()), arm.labels)

    def _draft_tokens(self, options: CallbackOptions) -> Iterator[Observation]:
        for arm, drafted, _ in self._snapshot():
            yield Observation(drafted, arm.labels)

    def _accepted_tokens(self, options: CallbackOptions) -> Iterator[Observation]:
        for arm, _, lengths in self._snapshot():
            yield Observation(sum(length * rounds for length, rounds in lengths.items()), arm.labels)

    def _accepted_tokens_per_position(self, options: CallbackOptions) -> Iterator[Observation]:
        pooled: dict[tuple[str | int, ...], tuple[Labels, dict[int, int]]] = {}  # steps together: series stay few
        for arm, _, lengths in self._snapshot():
            labels, positions = pooled.setdefault(tuple(arm.pooled.values()), (arm.pooled, {}))
            for length, rounds in lengths.items():
                for position in range(length):
                    positions[position] = positions.get(position, 0) + rounds
        for labels, positions in pooled.values():
            for position, count in sorted(positions.items()):
                yield Observation(count, {**labels, "metasd.draft.position": position})

    def _arm_values(self, options: CallbackOptions) -> Iterable[Observation]:
        with self._lock:
            shown = list(self._values.values())
        for labels, values in shown:
            for arm, value in values.items():
                yield Observation(value, {**labels, "metasd.drafter.name": arm})


class CallMetrics:
    """One call's part in them: `start`, `round` for each round, `end` once."""

    __slots__ = ("_instruments", "_labels", "_model", "_operation", "_pending", "_rounds", "_step", "_sums")

    def __init__(self, instruments: Instruments, operation: str, model: str, step: str) -> None:
        self._instruments = instruments
        self._operation, self._model, self._step = operation, model, instruments.step(step)
        self._labels = _labels(operation, model)
        self._pending: list[RoundRecord] = []
        self._rounds = 0  # flushed so far
        self._sums: dict[str, tuple[_Arm, list[int]]] = {}  # arm -> rounds, drafted, accepted of this call
        instruments.active.add(1, self._labels)

    @classmethod
    def start(cls, operation: str, model: str, step: str) -> CallMetrics | None:
        """Begin a call; None when nobody reads metrics.

        Args:
            operation: "text_completion" or "chat".
            model: name of the target model.
            step: the pipeline step's name, "" where nobody gave it one.
        """
        instruments = _instruments()
        return None if instruments is None else cls(instruments, operation, model, step)

    def round(self, record: RoundRecord) -> None:
        """Take note of a round; on the engine's thread."""
        self._pending.append(record)
        if len(self._pending) >= FLUSH_ROUNDS:
            self._flush()

    def end(
        self,
        summary: Summary | None,
        seconds: float,
        *,
        stream: bool,
        error: str | None,
        prompt: bool,
        context: Context,
    ) -> None:
        """End the call.

        Args:
            summary: the call in numbers, where it has any.
            seconds: from start to end.
            stream: whether the caller saw the answer piece by piece.
            error: the error's class, for a call that failed.
            prompt: whether the prompt's tokens count here; they count once for all answers to one prompt.
            context: holds the call's span, for exemplars.
        """
        instruments = self._instruments
        instruments.active.add(-1, self._labels)
        self._flush()
        labels: Labels = {**self._labels, "metasd.step": self._step} if self._step else self._labels
        if summary is not None:
            self._tokens(summary, labels, prompt, context)
            if stream and summary.rounds:
                instruments.first_chunk.record(summary.first_token_s, labels, context)
            if summary.values:
                instruments.note_values(self._operation, self._model, self._step, summary.policy, summary.values)
        for arm, (rounds, drafted, accepted) in self._sums.values():
            if drafted:
                instruments.accepted_length.record(1 + accepted / rounds, arm.labels)
        finish = "error" if error else summary.finish_reason if summary is not None else "cancelled"
        how: Labels = {"error.type": error} if error else {}
        instruments.duration.record(seconds, {**labels, **how, "metasd.finish_reason": finish}, context)

    def _tokens(self, summary: Summary, labels: Labels, prompt: bool, context: Context) -> None:
        for kind, count in (("input", summary.prompt_tokens if prompt else 0), ("output", summary.completion_tokens)):
            if count:
                self._instruments.usage.record(count, {**labels, "gen_ai.token.type": kind}, context)

    def _flush(self) -> None:
        instruments, drafted, lengths = self._instruments, dict[str, int](), dict[str, dict[int, int]]()
        for record in self._pending:
            name = record.arm
            if name not in self._sums:
                self._sums[name] = instruments.arm(self._operation, self._model, self._step, name), [0, 0, 0]
            if name not in lengths:
                drafted[name], lengths[name] = 0, {}
            drafted[name] += record.drafted
            lengths[name][record.accepted] = lengths[name].get(record.accepted, 0) + 1
            if self._rounds:
                instruments.round_duration.record(record.total_s, self._sums[name][0].pooled)
            self._rounds += 1
        self._pending.clear()
        for name, counts in lengths.items():
            arm, sums = self._sums[name]
            instruments.add(arm, drafted[name], counts)
            sums[0] += sum(counts.values())
            sums[1] += drafted[name]
            sums[2] += sum(length * rounds for length, rounds in counts.items())


# -- whose instruments -------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_own: MeterProvider | None = None  # of `setup_telemetry`, where it could not become the process's
# a provider's instruments are made once: an SDK takes no second set of callbacks under the same names
_made: WeakKeyDictionary[MeterProvider, Instruments] = WeakKeyDictionary()


def use(provider: MeterProvider | None) -> None:
    """Report to this provider instead of the process's; None: to the process's again."""
    global _own  # noqa: PLW0603  as OpenTelemetry's own provider is one a process
    _own = provider


def _instruments() -> Instruments | None:
    """Those of the provider there is now; None when there is none that records."""
    provider = _own or metrics.get_meter_provider()
    if type(provider).__module__.startswith("opentelemetry.metrics"):  # the API's own ones record nothing
        return None
    made = _made.get(provider)
    if made is None:
        with _lock:
            made = _made.get(provider)
            if made is None:
                made = _made[provider] = Instruments(provider.get_meter("metasd_langchain", __version__))
    return made


def _labels(operation: str, model: str) -> Labels:
    return {"gen_ai.operation.name": operation, "gen_ai.provider.name": "metasd", "gen_ai.request.model": model}
