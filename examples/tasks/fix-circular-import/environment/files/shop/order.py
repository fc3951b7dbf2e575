"""Orders."""

from shop.invoice import Invoice


class Order:
    def __init__(self, name, count, cents):
        self.name, self.count, self.cents = name, count, cents

    def total(self):
        return self.count + self.cents

    def invoice(self):
        return Invoice([self])
