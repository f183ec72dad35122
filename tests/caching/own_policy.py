from kvpolicy.caching import Lru


class FirstStored(Lru):
    name = "first-stored"

    def __init__(self):
        super().__init__(0)

    def use(self, before, prompt, position):
        return before or (prompt, -position)
