"""Invoices."""

from shop.order import Order


class Invoice:
    def __init__(self, orders):
        if not all(isinstance(order, Order) for order in orders):
            raise TypeError("orders only")
        self.orders = orders

    def total(self):
        return max(order.total() for order in self.orders)
