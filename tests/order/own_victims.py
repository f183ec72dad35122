from kvpolicy import Order, Rank


class SpareChats(Order):
    name = "spare-chats"
    displaces_by_rank = True

    def rank(self, request, view):
        return Rank((0 if request.class_name == "chat" else 1,))

    def admits(self, waiting, free_after_blocks, view):
        return waiting.class_name == "chat" or free_after_blocks >= view.device_blocks / 10

    def victims(self, waiting, running, view):
        return sorted(running, key=lambda other: other.computed_tokens)
