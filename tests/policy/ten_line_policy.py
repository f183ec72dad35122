from kvpolicy import Policy


class Longer(Policy):
    name = "longer"

    def probabilities(self, situation, options, state):
        others = situation.batch_tokens / max(1, situation.running_requests)
        swap = len(options) > 1 and situation.computed_tokens > others
        return [1.0 - swap, float(swap)][: len(options)]
