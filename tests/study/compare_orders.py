from kvpolicy import Run, simulate
from kvpolicy.stats import student_ratio
from tests.order.ten_line_order import ShortPromptsFirst

SEEDS = 5

if __name__ == "__main__":
    report = simulate(
        ["azure-conversation-2023?n=60&rate=40&context=2048"],
        ["cheapest:cpu-llama-native"],
        [300],
        "cpu-llama-native",
        run=Run(seeds=SEEDS),
        orders=[ShortPromptsFirst(), "fcfs"],
    )
    assert report.ok, report.text()
    mean_e2e_s = [result["e2e_s"]["mean"] for result in report.results]  # of one order after the other
    print(student_ratio(mean_e2e_s[:SEEDS], mean_e2e_s[SEEDS:]).text())
