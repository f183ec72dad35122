from kvpolicy.cost import CostModel as CostModel
from kvpolicy.cost import load_cost_model as load_cost_model
from kvpolicy.errors import KVPolicyError as KVPolicyError
from kvpolicy.evaluation import evaluate as evaluate
from kvpolicy.events import Cost as Cost
from kvpolicy.events import Decision as Decision
from kvpolicy.events import Option as Option
from kvpolicy.events import Outcome as Outcome
from kvpolicy.events import Preemption as Preemption
from kvpolicy.explanation import explain as explain
from kvpolicy.integrations import characterize as characterize
from kvpolicy.integrations import demo as demo
from kvpolicy.integrations import profile as profile
from kvpolicy.policy import Policy as Policy
from kvpolicy.policy import load_policy as load_policy
from kvpolicy.reporting.pipeline import report as report
from kvpolicy.simulator import Server as Server
from kvpolicy.simulator.hardware.import_profile import import_profile as import_profile
from kvpolicy.simulator.hardware.table_times import HardwareModel as HardwareModel
from kvpolicy.study.grid import simulate as simulate
from kvpolicy.study.recommend import recommend as recommend
from kvpolicy.trace import Trace as Trace
from kvpolicy.trace import read as read_trace
from kvpolicy.training import calibrate as calibrate
from kvpolicy.training import train as train
from kvpolicy.version import __version__ as __version__
from kvpolicy.workload import Request as Request
from kvpolicy.workload import Workload as Workload

__all__ = [
    "Cost",
    "CostModel",
    "Decision",
    "HardwareModel",
    "KVPolicyError",
    "Option",
    "Outcome",
    "Policy",
    "Preemption",
    "Request",
    "Server",
    "Trace",
    "Workload",
    "__version__",
    "calibrate",
    "characterize",
    "demo",
    "evaluate",
    "explain",
    "import_profile",
    "load_cost_model",
    "load_policy",
    "profile",
    "read_trace",
    "recommend",
    "report",
    "simulate",
    "train",
]
