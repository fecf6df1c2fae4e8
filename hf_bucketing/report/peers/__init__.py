"""What other trainers would do with rows, by their public rules: one module for each trainer."""

from .outcome import PeerReport, choose_peers, compare_peers, describe_peers

__all__ = ["PeerReport", "choose_peers", "compare_peers", "describe_peers"]
