"""Orders: which request is served first, whether one displaces another, and which one."""

from kvpolicy.order.base import Order, OrderError, Progress, Rank, View
from kvpolicy.order.candidates import Candidate, Choice
from kvpolicy.order.decodes_first import decodes_first
from kvpolicy.order.guard import Guarded
from kvpolicy.order.held_steps import Holding
from kvpolicy.order.lookout import Lookout
from kvpolicy.order.queue import OrderedQueue
from kvpolicy.order.ranks import Ranks
from kvpolicy.order.room import BackOff, Engine, Space, Taken, make_room
from kvpolicy.order.rules import Fcfs, Predictor, Priority, Srpt, is_stock
from kvpolicy.order.spec import FORMS, HELP, load, load_order

__all__ = [
    "FORMS",
    "HELP",
    "BackOff",
    "Candidate",
    "Choice",
    "Engine",
    "Fcfs",
    "Guarded",
    "Holding",
    "Lookout",
    "Order",
    "OrderError",
    "OrderedQueue",
    "Predictor",
    "Priority",
    "Progress",
    "Rank",
    "Ranks",
    "Space",
    "Srpt",
    "Taken",
    "View",
    "decodes_first",
    "is_stock",
    "load",
    "load_order",
    "make_room",
]
