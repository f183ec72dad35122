from kvpolicy import Order, Rank


class ShortPromptsFirst(Order):
    name = "short-prompts"
    displaces_by_rank = True
    quantum_tokens = 64

    def rank(self, request, view):
        return Rank((request.prompt_tokens // 1000,))
