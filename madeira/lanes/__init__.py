"""Lanes: the waiting line and the pace of one endpoint (of one host, for callback addresses).

What a lane may do next is decided in Redis, by ``madeira/broker/scripts/turn.lua``, since the lane is the queue of
``deliver``. Here stands how an endpoint's settings become those of its lanes.
"""

from madeira.lanes.pace import LaneSettings, credit_ms, gap_ms, is_slow, settings_of
from madeira.lanes.state import Hold, LaneState, Limit, lane_state
from madeira.lanes.verdict import Verdict, patience_s, verdict

__all__ = [
    "Hold",
    "LaneSettings",
    "LaneState",
    "Limit",
    "Verdict",
    "credit_ms",
    "gap_ms",
    "is_slow",
    "lane_state",
    "patience_s",
    "settings_of",
    "verdict",
]
