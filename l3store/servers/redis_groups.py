"""Several Valkey or Redis servers that belong together: a cluster; a master that may fail over."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from l3store.servers.process import HOST, wait_until
from l3store.servers.redis import RedisServer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

__all__ = ["RedisCluster", "RedisSentinel"]

_SLOTS = 16384  # of a cluster, always
_READY = 20.0


class RedisCluster:
    """Masters on 127.0.0.1 that share the slots evenly; no replicas.

    Starting blocks until all of them say that the cluster is well: two seconds, of which nearly
    all is what a master of a cluster waits before it takes writes.

    Args:
        nodes: How many.
        node_timeout: Seconds after which a node that does not answer is called failed.
        full_coverage: Whether a cluster with a failed node refuses everything, as servers do by
            default.
        settings: Of each node, as for `RedisServer`.
        **server: What else each `RedisServer` takes: `kind`, `password`, `maxmemory`, ...
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        node_timeout: float = 1.0,
        full_coverage: bool = False,
        settings: Mapping[str, str | int] | None = None,
        **server: Any,
    ) -> None:
        every: dict[str, str | int] = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": int(node_timeout * 1000),
            "cluster-require-full-coverage": "yes" if full_coverage else "no",
            "cluster-announce-ip": HOST,
        }
        password = server.get("password", "")
        if password:
            every["masterauth"] = password
        self._stack = ExitStack()
        with ExitStack() as started:
            self.nodes = [
                started.enter_context(RedisServer(settings=every | dict(settings or {}), **server))
                for _ in range(nodes)
            ]
            self._join()
            self._stack = started.pop_all()

    @property
    def url(self) -> str:
        """Of the first node, as of a server alone."""
        return self.nodes[0].url

    def node_of(self, slot: int) -> RedisServer:
        """Returns the node that a slot was given to at the start."""
        return self.nodes[slot * len(self.nodes) // _SLOTS]

    def node_id(self, node: RedisServer) -> str:
        """Returns what the cluster calls a node."""
        return _text(node.command("CLUSTER", "MYID"))

    def wait_until_well(self) -> None:
        """Blocks until each node that runs says that the cluster is well.

        Raises:
            BackendUnavailable: It is not in time.
        """
        for node in self.nodes:
            if node.process.running:
                wait_until(partial(_well, node, len(self.nodes)), "the cluster is well",
                           seconds=_READY)  # fmt: skip

    def restart(self, node: RedisServer) -> None:
        """Ends a node and starts it again, empty and as the same member of the cluster."""
        node.restart()
        self.wait_until_well()

    def stop(self) -> None:
        """Ends all nodes. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _join(self) -> None:
        first, count = self.nodes[0], len(self.nodes)
        for number, node in enumerate(self.nodes):
            begin, end = _SLOTS * number // count, _SLOTS * (number + 1) // count - 1
            node.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.command("CLUSTER", "ADDSLOTSRANGE", begin, end)
            if node is not first:
                first.command("CLUSTER", "MEET", HOST, node.port, node.bus_port)
        self.wait_until_well()


class RedisSentinel:
    """A master, its replica, and one sentinel that makes the replica the master if need be.

    Starting blocks until the sentinel knows both and the replica has caught up.

    Args:
        name: What the sentinel calls the master.
        down_after: Seconds after which a master that does not answer is given up.
        **server: What `RedisServer` takes, for master and replica.
    """

    def __init__(self, name: str = "l3", *, down_after: float = 1.0, **server: Any) -> None:
        self.name = name
        password = server.get("password", "")
        settings: dict[str, str | int] = dict(server.pop("settings", None) or {})
        if password:
            settings["masterauth"] = password
        settings |= {"repl-diskless-sync": "yes", "repl-diskless-sync-delay": 0}
        self._stack = ExitStack()
        with ExitStack() as started:
            self.master = started.enter_context(RedisServer(settings=settings, **server))
            follow: dict[str, str | int] = {"replicaof": f"{HOST} {self.master.port}"}
            self.replica = started.enter_context(RedisServer(settings=settings | follow, **server))
            wait_until(lambda: self.replica.info("replication")["master_link_status"] == "up",
                       "the replica has caught up", seconds=_READY)  # fmt: skip
            self.sentinel = started.enter_context(
                _Sentinel(name, self.master, password, down_after, kind=server.get("kind"))
            )
            wait_until(self._knows_both, "the sentinel knows the replica", seconds=_READY)
            self._stack = started.pop_all()

    def master_port(self) -> int:
        """Returns where the sentinel says that the master is."""
        _, port = self.sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
        return int(port)

    def wait_for_failover(self) -> None:
        """Blocks until the sentinel names the other server, and that one takes writes.

        Raises:
            BackendUnavailable: Not in time.
        """
        other = self.replica
        wait_until(
            lambda: self.master_port() == other.port
            and other.info("replication")["role"] == "master",
            "the replica has become the master", seconds=_READY,
        )  # fmt: skip

    def stop(self) -> None:
        """Ends all three. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _knows_both(self) -> bool:
        with self.sentinel.client() as client:
            replicas = client.sentinel_slaves(self.name)
        # As it saw it last: before it has, it would promote none.
        return [one["master-link-status"] for one in replicas] == ["ok"]


class _Sentinel(RedisServer):
    """Watches one master alone, so its own word is enough."""

    def __init__(
        self, name: str, master: RedisServer, password: str, down_after: float, **server: Any
    ) -> None:
        watch: dict[str, str | int] = {
            "sentinel monitor": f"{name} {HOST} {master.port} 1",
            "sentinel down-after-milliseconds": f"{name} {int(down_after * 1000)}",
            "sentinel failover-timeout": f"{name} 5000",
        }
        if password:
            watch["sentinel auth-pass"] = f"{name} {password}"
        super().__init__(settings=watch, **server)

    def _configured(self) -> dict[str, str | int]:
        left_out = {"save", "appendonly", "maxmemory", "maxmemory-policy"}
        every = super()._configured()
        return {line: value for line, value in every.items() if line not in left_out}

    def _role(self) -> Sequence[str]:
        return ("--sentinel",)


def _well(node: RedisServer, nodes: int) -> bool:
    said = dict(
        line.split(":", 1) for line in _text(node.command("CLUSTER", "INFO")).split() if ":" in line
    )
    return (
        said["cluster_state"] == "ok"
        and int(said["cluster_slots_ok"]) == _SLOTS
        and int(said["cluster_known_nodes"]) == nodes
    )


def _text(said: Any) -> str:
    return said.decode() if isinstance(said, bytes) else str(said)
