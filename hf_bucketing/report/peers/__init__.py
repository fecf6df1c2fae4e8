"""What other trainers would do with rows, by their public rules: one module for each trainer."""

from .choose import PEERS, choose_peers
from .outcome import PeerReport, compare_peers
from .table import describe_peers, peer_cells, peer_notes

__all__ = ["PEERS", "PeerReport", "choose_peers", "compare_peers", "describe_peers", "peer_cells", "peer_notes"]
