from kvpolicy import Run, Serving, simulate
from kvpolicy.stats import student_ratio
from tests.order.ten_line_order import ShortPromptsFirst


def mean_e2e_s(order):
    report = simulate(
        ["azure-conversation-2023?n=60&rate=40&context=2048"],
        ["cheapest:cpu-llama-native"],
        [300],
        "cpu-llama-native",
        serving=Serving(order=order),
        run=Run(seeds=5),
    )
    assert report.ok, report.text()
    return [result["e2e_s"]["mean"] for result in report.results]


if __name__ == "__main__":
    print(student_ratio(mean_e2e_s(ShortPromptsFirst()), mean_e2e_s("fcfs")).text())
