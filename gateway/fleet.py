"""The replicas as they come and go: started, added, drained, restarted and taken out while others serve.

Nothing that was accepted is lost by any of it: a replica that goes is sent nothing new, finishes what it
runs within the grace period, and what is left then moves elsewhere where nothing of it has gone out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import structlog

from headrace.config import Config, ReplicaEntry
from headrace.config.replicas import entry_problem
from headrace.errors import ConfigError, InvalidRequest, RequestError
from headrace.gateway.lifecycle import until_idle
from headrace.gateway.readiness import replica_status
from headrace.gateway.replica import Replica
from headrace.gateway.router import Router
from headrace.gateway.text_assets import TextAssets

Make = Callable[[Config, int, ReplicaEntry, str], Replica]
"""(configuration, index of the model, entry, id) -> a replica that is not started."""

_logger = structlog.get_logger("headrace.gateway")


@dataclass(frozen=True, slots=True)
class Reload:
    """What became of a configuration read again."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    """Keys whose change takes effect at the next start only."""


class UnknownReplica(RequestError):
    """There is no replica of that id."""

    code = "unknown_replica"
    http_status = 404


class ReplicaIsLeaving(RequestError):
    """The replica is being taken out or started again, and that goes on."""

    code = "replica_is_leaving"
    http_status = 409


class Fleet:
    """The replicas of one gateway. Every method belongs to its event loop."""

    def __init__(self, config: Config, router: Router, make: Make, texts: TextAssets) -> None:
        self._config = config
        self._router = router
        self._make = make
        self._texts = texts
        self._numbers: dict[str, int] = {}
        self._orders: dict[Replica, Literal["remove", "restart"]] = {}
        """What becomes of replicas that finish what they run."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        for index, model in enumerate(config.models):
            replicas = [self._new(config, index, entry) for entry in model.replica_entries]
            router.set_replicas(model.name, replicas)

    # --- start and end ----------------------------------------------------------

    async def start(self) -> list[str]:
        """Start every replica at once; return why those that cannot start cannot."""
        replicas = self._router.replicas()
        outcomes = await asyncio.gather(*(self._start(replica) for replica in replicas))
        return [reason for reason in outcomes if reason is not None]

    async def close(self) -> None:
        """Stop everything now. A second close does nothing more."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(replica.client.close() for replica in self._router.replicas()))

    async def _start(self, replica: Replica) -> str | None:
        try:
            await replica.client.start()
        except RequestError as error:
            return str(error)
        if replica.client.card is not None:
            await self._texts.get(replica.client.card)  # warns now, and spares the first request
        return None

    # --- changes ----------------------------------------------------------------

    def add(self, model: str, entry: ReplicaEntry) -> list[str]:
        """Add as many replicas as the entry counts, and start them. Returns their ids.

        Raises ModelNotFound, or InvalidRequest where the entry cannot work.
        """
        group = self._router.resolve(model)
        problem = entry_problem(entry)
        if problem is not None:
            raise InvalidRequest(f"{problem[0]}: {problem[1]}", param=problem[0])
        index = [each.name for each in self._config.models].index(group.name)
        alone = msgspec.structs.replace(entry, count=1)
        try:
            added = self._made(index, [alone] * entry.count)
        except ConfigError as error:
            raise InvalidRequest(str(error)) from error
        self._install(group.name, added)
        return [replica.id for replica in added]

    def drain(self, replica_id: str) -> Replica:
        """Send a replica nothing new; what it runs goes on. Raises UnknownReplica."""
        replica = self.find(replica_id)
        replica.is_draining = True
        _logger.info("replica drains", replica=replica_id)
        return replica

    def resume(self, replica_id: str) -> Replica:
        """Send a drained replica requests again. Raises UnknownReplica or ReplicaIsLeaving."""
        replica = self.find(replica_id)
        self._check_stays(replica, "remove", "restart")
        replica.is_draining = False
        _logger.info("replica serves again", replica=replica_id)
        return replica

    def remove(self, replica_id: str) -> Replica:
        """Drain a replica, then stop it and forget it, whatever was ordered before.

        Raises UnknownReplica.
        """
        return self._order(self.find(replica_id), "remove")

    def restart(self, replica_id: str) -> Replica:
        """Drain a replica, then start it anew under the same id.

        Raises UnknownReplica, or ReplicaIsLeaving where it is being removed.
        """
        replica = self.find(replica_id)
        self._check_stays(replica, "remove")
        return self._order(replica, "restart")

    def _order(self, replica: Replica, order: Literal["remove", "restart"]) -> Replica:
        self.drain(replica.id)
        if replica not in self._orders:
            self._spawn(self._take_out(replica))
        self._orders[replica] = order
        return replica

    def _check_stays(self, replica: Replica, *orders: str) -> None:
        order = self._orders.get(replica)
        if order in orders:
            raise ReplicaIsLeaving(
                f"the replica '{replica.id}' waits for its requests and then comes the {order} that "
                "was ordered; add another one instead"
            )

    def find(self, replica_id: str) -> Replica:
        """Return a replica. Raises UnknownReplica."""
        replica = self._router.find(replica_id)
        if replica is None:
            known = ", ".join(each.id for each in self._router.replicas())
            raise UnknownReplica(f"there is no replica '{replica_id}'. Known: {known}")
        return replica

    def reload(self, config: Config) -> Reload:
        """Make the replicas those of a configuration read again; all else waits for a restart."""
        later = changed_keys(self._config, config)
        models = {model.name: model for model in config.models}
        plans: list[tuple[str, list[Replica], list[Replica]]] = []
        for index, old in enumerate(self._config.models):
            if old.name in models:
                wanted = models[old.name].replica_entries
                missing, surplus = _difference(self._staying(old.name), wanted)
                plans.append((old.name, self._made(index, missing), surplus))
        for model, new, surplus in plans:
            self._install(model, new)
            for replica in surplus:
                self.remove(replica.id)
        self._config = msgspec.structs.replace(
            self._config,
            models=tuple(
                msgspec.structs.replace(old, replicas=models[old.name].replicas)
                if old.name in models
                else old
                for old in self._config.models
            ),
        )
        outcome = Reload(
            added=tuple(replica.id for _, new, _ in plans for replica in new),
            removed=tuple(replica.id for _, _, surplus in plans for replica in surplus),
            needs_restart=tuple(later),
        )
        _logger.info("configuration read again", **msgspec.to_builtins(outcome))
        return outcome

    def _staying(self, model: str) -> list[Replica]:
        """Return the replicas that are not being removed; those that serve now first."""
        replicas = self._router.resolve(model).replicas
        staying = [each for each in replicas if self._orders.get(each) != "remove"]
        return sorted(staying, key=lambda replica: replica.is_draining)

    # --- the work behind --------------------------------------------------------

    def _made(self, index: int, entries: Sequence[ReplicaEntry]) -> list[Replica]:
        """Return new replicas of a model, each with its share of the host as it then is."""
        models = []
        for place, model in enumerate(self._config.models):
            now = [replica.entry for replica in self._router.resolve(model.name).replicas]
            now += entries if place == index else []
            models.append(msgspec.structs.replace(model, replicas=tuple(now)))
        config = msgspec.structs.replace(self._config, models=tuple(models))
        return [self._new(config, index, entry) for entry in entries]

    def _new(self, config: Config, index: int, entry: ReplicaEntry) -> Replica:
        name = config.models[index].name
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        return self._make(config, index, entry, f"{name}-{number}")

    def _install(self, model: str, replicas: Sequence[Replica]) -> None:
        before = self._router.resolve(model).replicas
        self._router.set_replicas(model, [*before, *replicas])
        for replica in replicas:
            self._spawn(self._start_later(replica))

    def _again(self, replica: Replica) -> Replica:
        index = [each.name for each in self._config.models].index(replica.model_name)
        return self._make(self._config, index, replica.entry, replica.id)

    async def _start_later(self, replica: Replica) -> None:
        reason = await self._start(replica)
        if reason is not None:
            _logger.error("replica cannot start", replica=replica.id, reason=reason)

    async def _take_out(self, replica: Replica) -> None:
        """Wait for what a replica runs, stop it, and put a new one in its place where one is ordered."""
        ledger = self._router.ledger
        grace = self._config.gateway.grace_period
        was_idle = await until_idle(lambda: ledger.load(replica.id).num_requests, grace)
        order = self._orders.pop(replica)
        others = [
            each for each in self._router.resolve(replica.model_name).replicas if each != replica
        ]
        following = [self._again(replica)] if order == "restart" else []
        self._router.set_replicas(replica.model_name, [*others, *following])
        await replica.client.close()
        _logger.info("replica stopped", replica=replica.id, finished=was_idle)
        for each in following:
            await self._start_later(each)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_closed:
            work.close()
            raise InvalidRequest("the server is stopping; its replicas stay as they are")
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _logger.error("a change of replicas failed", exc_info=task.exception())

    # --- what there is ----------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """Return every replica as the admin API shows it."""
        return [self.describe_one(replica) for replica in self._router.replicas()]

    def describe_one(self, replica: Replica) -> dict[str, Any]:
        load = self._router.ledger.load(replica.id)
        shown: dict[str, Any] = {
            "id": replica.id,
            "model": replica.model_name,
            "kind": replica.entry.kind,
            **replica_status(replica),
            "requests": load.num_requests,
            "restarts": replica.client.restarts_total,
            "breaker": "closed" if replica.breaker.is_closed else "open",
        }
        if replica.upstream is not None:
            shown["url"] = replica.entry.url
        pid = getattr(replica.client, "pid", None)
        if pid is not None:
            shown["pid"] = pid
        return shown


def _difference(
    there: Sequence[Replica], wanted: Sequence[ReplicaEntry]
) -> tuple[list[ReplicaEntry], list[Replica]]:
    """Return (entries without a replica, replicas that nothing asks for)."""
    surplus = list(there)
    missing = []
    for entry in wanted:
        match = next((each for each in surplus if each.entry == entry), None)
        if match is None:
            missing.append(entry)
        else:
            surplus.remove(match)
    return missing, surplus


def changed_keys(old: Config, new: Config) -> list[str]:
    """Return the keys, apart from `replicas`, that differ: what a reload cannot change."""
    changed = [
        name
        for name in Config.__struct_fields__
        if name not in ("models", "base_dir") and getattr(old, name) != getattr(new, name)
    ]
    before = {model.name: model for model in old.models}
    after = {model.name: model for model in new.models}
    for name in [*before, *(each for each in after if each not in before)]:
        if name not in before or name not in after:
            changed.append(f"models ({name})")
            continue
        changed += [
            f"models ({name}).{key}"
            for key in before[name].__struct_fields__
            if key != "replicas" and getattr(before[name], key) != getattr(after[name], key)
        ]
    return changed
