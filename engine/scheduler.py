"""Who computes how many of its pending tokens this step, within the memory there is.

There is no prefill and no decode phase. Sequences with one pending token come first; the others
share what is left of the budget, short prompts ahead of long ones for at most half of it, so that a
long prompt neither blocks a short one nor is starved.

Bounds on preemption, whatever the policy says: the sequence that has been running longest is never
taken back for memory, so it ends; one taken back starts again only when everything it had fits and
room for the growth of the others is left, twice as much each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType

from headrace.engine.batch import BatchPlan, PlannedSequence
from headrace.engine.chunks import bound_by_scoring, decodes, in_turn, planned, planned_decode
from headrace.engine.kv_cache import KVCache
from headrace.engine.ranking import Ranking, deciding
from headrace.engine.sequence import Family, Sequence, Status
from headrace.interfaces import SchedulingPolicy
from headrace.step_time import StepTimeModel
from headrace.types import EngineSettings, SchedulerView, TenantService
from headrace.types.views import set_fact

MAX_RANK_PREEMPTIONS = 3
"""How often a sequence is taken back for one of higher priority; after that it keeps its place."""

MAX_TENANTS = 4096
"""Of whom is kept what they were served."""


class Scheduler:
    """Owns the queue, the slots and the growth of sequences. Never sees a tensor."""

    def __init__(
        self,
        kv_cache: KVCache,
        policy: SchedulingPolicy,
        settings: EngineSettings,
        step_time: StepTimeModel,
        *,
        max_score_rows: int,
    ) -> None:
        self.kv_cache = kv_cache
        self.policy = policy
        self.step_time = step_time
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """In the order in which they started to run, the oldest first."""
        self.num_pending = 0
        self.preemptions_total = 0
        self.tenants: OrderedDict[str, TenantService] = OrderedDict()
        """Whoever was served longest ago first."""
        self.num_slots = min(settings.max_num_sequences, settings.max_batched_tokens)
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._max_batched_tokens = settings.max_batched_tokens
        self._max_score_rows = max_score_rows
        self._ranking = Ranking(policy, kv_cache)
        self._is_ahead = False
        self._blocked: tuple[Sequence, int, int] | None = None
        self._view = SchedulerView(
            now=0.0,
            token_budget=0,
            decoding=0,
            prefilling=0,
            num_free_blocks=0,
            num_blocks=kv_cache.pool.num_blocks,
            tenants=MappingProxyType(self.tenants),
            step_seconds=step_time.predict,
            running=lambda: [sequence.refresh_view() for sequence in self.running],
        )

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot; further choices of a prompt being computed count."""
        return len(self.waiting) + self.num_pending

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    # --- coming and going -------------------------------------------------------

    def add(self, family: Family) -> None:
        leader = family.leader
        self.num_pending += len(family.sequences) - 1
        num_cached_tokens = len(self.kv_cache.cached_blocks(leader)) * self.kv_cache.block_size
        set_fact(leader.view, "num_cached_tokens", num_cached_tokens)
        self._enqueue(leader)

    def remove(self, sequence: Sequence, *, are_rows_valid: bool = True) -> None:
        """Take a sequence out, whatever its stage, and free what it holds."""
        if sequence.status is Status.PENDING:
            self.num_pending -= 1
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._stop(sequence, are_rows_valid=are_rows_valid)
        sequence.status = Status.FINISHED

    def place_fork(self, source: Sequence, target: Sequence) -> list[tuple[int, int]]:
        """Start a further choice behind the prompt that `source` has just computed.

        Returns the blocks to copy. Where no slot or block is free the choice waits its turn and
        computes the prompt itself, mostly from the prefix cache.
        """
        self.num_pending -= 1
        target.num_cached_tokens = source.num_cached_tokens
        target.start_time = source.start_time
        pairs = self.kv_cache.try_fork(source, target) if self._free_slots else None
        if pairs is None:
            self._enqueue(target)
            return []
        self._start(target)
        return pairs

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self.waiting.append(sequence)
        self._ranking.note_arrival(sequence)

    def book(self, tenant: str, now: float, **tokens: int) -> None:
        """Add tokens, by field of TenantService, to what a tenant was served.

        Of too many tenants, those served longest ago are forgotten.
        """
        service = self.tenants.get(tenant)
        if service is None:
            if len(self.tenants) >= MAX_TENANTS:
                self.tenants.popitem(last=False)
            service = self.tenants[tenant] = TenantService()
        else:
            self.tenants.move_to_end(tenant)
        set_fact(service, "last_active", now)
        for name, number in tokens.items():
            set_fact(service, name, getattr(service, name) + number)

    def _start(self, sequence: Sequence) -> None:
        if sequence.index == 0 and sequence.num_preemptions == 0:
            self.book(
                sequence.request.tenant,
                self._view.now,
                input_tokens=sequence.num_tokens,
                cached_tokens=sequence.view.num_cached_tokens,
            )
        sequence.status = Status.RUNNING
        sequence.slot = self._free_slots.pop()
        self.running.append(sequence)

    def _stop(self, sequence: Sequence, *, are_rows_valid: bool = True) -> None:
        self.running.remove(sequence)
        if not are_rows_valid:
            self.kv_cache.withdraw(sequence)
        if not sequence.num_flying_tokens:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take back slot and blocks of a sequence that left: at once, or when no step writes them any more."""
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        self.kv_cache.free(sequence)
        self._ranking.note_free_place()

    def _preempt(self, sequence: Sequence, plan: BatchPlan) -> None:
        plan.drop(sequence)
        self._stop(sequence)
        sequence.num_preemptions += 1
        self.preemptions_total += 1
        self._enqueue(sequence)

    def next_decision_at(self) -> float | None:
        """Return when those who wait are to be ranked again though nothing changed; None: never."""
        if not self.waiting:
            return None
        return self._ranking.next_decision_at(has_free_slot=bool(self._free_slots))

    # --- a step -----------------------------------------------------------------

    def schedule(self, now: float) -> BatchPlan:
        """Return what to run now. Empty only when nothing is waiting or running."""
        self.kv_cache.pool.now = now
        plan = BatchPlan()
        self._plan_decodes(plan)
        if self.waiting:
            self._admit(plan, now)
        if len(self.running) > plan.num_decodes:
            self._plan_prefills(plan, now)
        return plan

    def schedule_ahead(
        self, now: float, fits: Callable[[int, int], bool] | None = None
    ) -> BatchPlan | None:
        """Return what to run after the step in flight, before its result is in.

        `fits(tokens, KV rows)` says whether a step can be launched then; without it any can. None:
        it may not, there is nothing to run, or somebody would have to be taken back, whose blocks are
        free only when no step writes them.
        """
        if fits is not None and not self._are_decodes_that(fits):
            return None
        self._is_ahead = True
        try:
            plan = self.schedule(now)
        except _MustWait:
            return None
        finally:
            self._is_ahead = False
        return plan if plan.entries else None

    def _are_decodes_that(self, fits: Callable[[int, int], bool]) -> bool:
        if self.waiting or not all(map(decodes, self.running)):
            return False
        num_rows = sum([sequence.num_kv_rows() + 1 for sequence in self.running])
        return fits(len(self.running), num_rows)

    def _plan_decodes(self, plan: BatchPlan) -> None:
        size = self.kv_cache.block_size
        entries = plan.entries
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING or not decodes(sequence):
                continue
            if self._is_ahead and sequence.is_last_token_flying:
                continue
            room = len(sequence.block_ids) * size - sequence.num_kv_rows()
            if room > 0 or self._try_make_room(sequence, 1, plan):
                entries.append(planned_decode(sequence))
                plan.num_decodes += 1

    def _try_make_room(self, sequence: Sequence, num_tokens: int, plan: BatchPlan) -> bool:
        """Find blocks for a sequence, taking others back; False: it was taken back itself."""
        while not self.kv_cache.try_grow(sequence, num_tokens):
            if self._is_ahead:
                raise _MustWait
            candidates = [other for other in self.running[1:] if other.block_ids]
            victim = self._choose_victim(candidates)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _choose_victim(self, candidates: list[Sequence]) -> Sequence:
        assert candidates, (
            "the pool holds any one sequence, so blocks are missing only among several"
        )
        if len(candidates) == 1:
            return candidates[0]
        views = [sequence.refresh_view() for sequence in candidates]
        chosen = self.policy.choose_victim(views, self._refresh_view())
        return next(sequence for sequence in candidates if sequence.view is chosen)

    def _refresh_view(self, num_prefilling: int | None = None) -> SchedulerView:
        view = self._view
        if num_prefilling is None:
            num_prefilling = len(self.running) - sum(map(decodes, self.running))
        set_fact(view, "num_free_blocks", self.kv_cache.pool.num_free)
        set_fact(view, "prefilling", num_prefilling)
        set_fact(view, "decoding", len(self.running) - num_prefilling)
        return view

    # --- from waiting to running ------------------------------------------------

    def _admit(self, plan: BatchPlan, now: float) -> None:
        """Give slots to waiting sequences in the policy's order, up to the first that does not fit."""
        set_fact(self._view, "now", now)
        if self._ranking.is_due(now, has_free_slot=bool(self._free_slots)):
            self.waiting = self._ranking.order(self.waiting, self._refresh_view())
        for sequence in list(self.waiting):
            if self._ranking.num_to_start <= 0 and not all(map(decodes, self.running)):
                return
            if not self._can_start(sequence) and not self._try_make_way(sequence, plan):
                return
            self.waiting.remove(sequence)
            self._start(sequence)
            self._ranking.num_to_start -= 1

    def _can_start(self, sequence: Sequence) -> bool:
        """Whether a slot is free, and blocks for all its tokens beside what the others still need."""
        if not self._free_slots:
            return False
        if not self.running:
            return True
        state = (sequence, self.kv_cache.pool.num_free, len(self.running))
        if self._blocked is not None and self._blocked == state:
            return False
        if self._missing_blocks(sequence) > 0:
            self._blocked = state
            return False
        return True

    def _missing_blocks(self, sequence: Sequence) -> int:
        """Return how many free blocks too few there are for a sequence to start (0 or less: enough)."""
        kv_cache = self.kv_cache
        reserved = sum(
            max(0, kv_cache.blocks_to_finish(other)) for other in self.running if not decodes(other)
        )
        growth = len(self.running) << min(sequence.num_preemptions, 24)
        needed = kv_cache.blocks_to_start(sequence) + reserved + growth
        return needed - kv_cache.pool.num_free

    def _try_make_way(self, sequence: Sequence, plan: BatchPlan) -> bool:
        """Take back sequences of lower priority for one that the policy ranks before them.

        Both must say so: the request's `priority`, which never changes and so cannot make two
        requests take turns at taking each other back, and the policy's own order over all of them.
        """
        priority = sequence.request.priority
        lower = [
            other
            for other in self.running
            if other.request.priority > priority and other.num_preemptions < MAX_RANK_PREEMPTIONS
        ]
        if not lower:
            return False
        if self._is_ahead:
            raise _MustWait
        views = [other.refresh_view() for other in lower]
        order = self.policy.rank_waiting([*views, sequence.refresh_view()], self._refresh_view())
        behind = [id(view) for view in order]
        behind = behind[behind.index(id(sequence.view)) + 1 :]
        candidates = [other for other in lower if id(other.view) in behind]
        most = sum(len(other.block_ids) for other in candidates)
        if not candidates or (
            len(candidates) < len(self.running) and self._missing_blocks(sequence) > most
        ):
            return False
        while candidates and not self._can_start(sequence):
            victim = self._choose_victim(candidates)
            candidates.remove(victim)
            self._preempt(victim, plan)
        return self._can_start(sequence)

    # --- prompt chunks ----------------------------------------------------------

    def _plan_prefills(self, plan: BatchPlan, now: float) -> None:
        prefilling = [sequence for sequence in self.running if not decodes(sequence)]
        if not prefilling:
            return
        budget = self._prefill_budget(plan, len(prefilling), now)
        score_rows = self._max_score_rows
        for sequence in in_turn(prefilling, budget):
            if budget <= 0:
                break
            if sequence.status is not Status.RUNNING:
                continue
            entry = self._try_plan_chunk(sequence, budget, score_rows, plan)
            if entry is not None:
                budget -= entry.num_tokens
                score_rows -= entry.num_score_rows
                plan.entries.append(entry)
                if sequence.start_time is None:
                    sequence.start_time = now

    def _prefill_budget(self, plan: BatchPlan, num_prefilling: int, now: float) -> int:
        """Return the prompt tokens of this step: the policy's wish, within budget and TPOT targets.

        With targets a block's worth is the least, and without decodes too, so that prompts progress.
        """
        view = self._refresh_view(num_prefilling)
        set_fact(view, "now", now)
        set_fact(view, "token_budget", self._max_batched_tokens - plan.num_decodes)
        least = min(self.kv_cache.block_size, view.token_budget)
        wish = max(0, min(self.policy.prefill_budget(view), view.token_budget))
        if plan.num_decodes == 0:
            return max(wish, least)
        decoding = [entry.sequence for entry in plan.entries]
        targets = [t for s in decoding if (t := s.request.tpot_target_seconds) is not None]
        looks_itself = getattr(deciding(self.policy), "meets_tpot_targets", False)
        if not targets or looks_itself or not self.step_time.is_fitted:
            return wish
        within = self.step_time.formula.prefill_tokens_within(
            min(targets), len(decoding), sum(s.num_kv_rows() for s in decoding), view.token_budget
        )
        return min(wish, max(within, least))

    def _try_plan_chunk(
        self, sequence: Sequence, budget: int, score_rows: int, plan: BatchPlan
    ) -> PlannedSequence | None:
        """Plan as many pending tokens as budget and memory allow; None: not one."""
        if not sequence.has_begun:
            self.kv_cache.begin(sequence)
        num_tokens = min(sequence.num_pending_tokens, budget)
        num_tokens, num_score_rows = bound_by_scoring(sequence, num_tokens, score_rows)
        if sequence is self.running[0]:
            if num_tokens <= 0 or not self._try_make_room(sequence, num_tokens, plan):
                return None
        else:
            num_tokens = min(num_tokens, self.kv_cache.rows_available(sequence))
            if num_tokens <= 0:
                return None
            num_tokens, num_score_rows = bound_by_scoring(sequence, num_tokens, score_rows)
            self.kv_cache.try_grow(sequence, num_tokens)
        return planned(sequence, num_tokens, num_score_rows)


class _MustWait(Exception):
    """A step cannot be planned before the one in flight gave its result."""
