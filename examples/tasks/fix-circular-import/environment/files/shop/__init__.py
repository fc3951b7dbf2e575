"""A very small shop."""

from shop.order import Order
from shop.invoice import Invoice
