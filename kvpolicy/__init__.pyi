from kvpolicy.cost import CostModel as CostModel
from kvpolicy.cost import FittedModel as FittedModel
from kvpolicy.cost import load_cost_model as load_cost_model
from kvpolicy.errors import KVPolicyError as KVPolicyError
from kvpolicy.evaluation import Estimation as Estimation
from kvpolicy.evaluation import EvaluationReport as EvaluationReport
from kvpolicy.evaluation import OffPolicyReport as OffPolicyReport
from kvpolicy.evaluation import ShadowSavings as ShadowSavings
from kvpolicy.evaluation import evaluate as evaluate
from kvpolicy.evaluation import shadow_savings as shadow_savings
from kvpolicy.events import Cost as Cost
from kvpolicy.events import Decision as Decision
from kvpolicy.events import Option as Option
from kvpolicy.events import Outcome as Outcome
from kvpolicy.events import Preemption as Preemption
from kvpolicy.explanation import Explanation as Explanation
from kvpolicy.explanation import Question as Question
from kvpolicy.explanation import explain as explain
from kvpolicy.integrations import characterize as characterize
from kvpolicy.integrations import check as check
from kvpolicy.integrations import demo as demo
from kvpolicy.integrations import profile as profile
from kvpolicy.integrations import serve as serve
from kvpolicy.order import Order as Order
from kvpolicy.order import Progress as Progress
from kvpolicy.order import Rank as Rank
from kvpolicy.order import View as View
from kvpolicy.order import load_order as load_order
from kvpolicy.policy import Feedback as Feedback
from kvpolicy.policy import LearningPolicy as LearningPolicy
from kvpolicy.policy import Objective as Objective
from kvpolicy.policy import Policy as Policy
from kvpolicy.policy import PricedPolicy as PricedPolicy
from kvpolicy.policy import load_policy as load_policy
from kvpolicy.reporting.pipeline import report as report
from kvpolicy.settings import Measurement as Measurement
from kvpolicy.settings import ServerSettings as ServerSettings
from kvpolicy.simulator import Server as Server
from kvpolicy.simulator.hardware.import_profile import import_profile as import_profile
from kvpolicy.simulator.hardware.table_times import HardwareModel as HardwareModel
from kvpolicy.study.config import Criterion as Criterion
from kvpolicy.study.config import Run as Run
from kvpolicy.study.config import Serving as Serving
from kvpolicy.study.grid import simulate as simulate
from kvpolicy.study.offline_demo import offline_demo as offline_demo
from kvpolicy.study.recommend import Advice as Advice
from kvpolicy.study.recommend import recommend as recommend
from kvpolicy.study.report import SweepReport as SweepReport
from kvpolicy.trace import Trace as Trace
from kvpolicy.trace import read as read_trace
from kvpolicy.training import CalibrateReport as CalibrateReport
from kvpolicy.training import TrainReport as TrainReport
from kvpolicy.training import calibrate as calibrate
from kvpolicy.training import train as train
from kvpolicy.training.family import Family as Family
from kvpolicy.training.reports import LogTrainReport as LogTrainReport
from kvpolicy.version import __version__ as __version__
from kvpolicy.workload import Request as Request
from kvpolicy.workload import Workload as Workload
from kvpolicy.workload import open_workload as open_workload

__all__ = [
    "Advice",
    "CalibrateReport",
    "Cost",
    "CostModel",
    "Criterion",
    "Decision",
    "Estimation",
    "EvaluationReport",
    "Explanation",
    "Family",
    "Feedback",
    "FittedModel",
    "HardwareModel",
    "KVPolicyError",
    "LearningPolicy",
    "LogTrainReport",
    "Measurement",
    "Objective",
    "OffPolicyReport",
    "Option",
    "Order",
    "Outcome",
    "Policy",
    "Preemption",
    "PricedPolicy",
    "Progress",
    "Question",
    "Rank",
    "Request",
    "Run",
    "Server",
    "ServerSettings",
    "Serving",
    "ShadowSavings",
    "SweepReport",
    "Trace",
    "TrainReport",
    "View",
    "Workload",
    "__version__",
    "calibrate",
    "characterize",
    "check",
    "demo",
    "evaluate",
    "explain",
    "import_profile",
    "load_cost_model",
    "load_order",
    "load_policy",
    "offline_demo",
    "open_workload",
    "profile",
    "read_trace",
    "recommend",
    "report",
    "serve",
    "shadow_savings",
    "simulate",
    "train",
]
