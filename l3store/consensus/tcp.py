"""A link over TCP: a star around rank 0, for groups of processes on one machine or many.

Each follower has two connections to the leader. Records, and whatever must keep their order, come
down the first; the follower's own thread reads it, so that a record costs no hand-over between
threads. Reports, beats and urgent notices use the second, served by one thread on each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.consensus.tcp_follower import Follower
from l3store.consensus.tcp_leader import Leader

if TYPE_CHECKING:
    from l3store.consensus.values import Config

__all__ = ["TcpLink"]


class TcpLink:
    """The two ends of a link over TCP; both are a `ReportLink`.

    Rank 0 listens and gives its address to the others by means of the engine; they connect.
    """

    @staticmethod
    def listen(config: Config, host: str = "127.0.0.1", port: int = 0) -> Leader:
        """Opens the leader's end. Does not wait for the others: `share` does.

        Args:
            config: Equal on all ranks; the ranks, their names, heartbeat and timeout come from it.
            host: Address or name of one interface, which the other ranks can reach.
            port: 0: a free one.

        Raises:
            ConfigError: No such address here, or one that stands for every interface.
        """
        return Leader(config, host, port)

    @staticmethod
    def connect(address: str, config: Config, rank: int, timeout_s: float = 60.0) -> Follower:
        """Connects a rank to its leader; blocks until the leader has let it in.

        Args:
            address: The leader's.
            config: Equal on all ranks.
            rank: Of this process: 1 to ranks - 1.
            timeout_s: It is tried for so long.

        Raises:
            ConfigError: It is no such address, or two processes claim one rank, or they count the
                ranks differently. Then it comes on all that are there, until the group is complete;
                after that, on the one that comes too much.
            ConsensusError: The leader cannot be reached, or the group has ended.
        """
        return Follower(address, config, rank, timeout_s)
