"""The verifier of this task. See grade.py."""

from grade import begin, evaluate, finish

begin()
CASES = {
    'shop.Order("pen", 3, 120).total()': "360",
    'shop.Invoice([shop.Order("a", 2, 5), shop.Order("b", 1, 7)]).total()': "17",
    'type(shop.Order("a", 2, 5).invoice()).__name__, shop.Order("a", 2, 5).invoice().total()': "('Invoice', 10)",
    "shop.Order.__module__, shop.Invoice.__module__": "('shop.order', 'shop.invoice')",
    "shop.Invoice([1])": "TypeError",
    "shop.Invoice([]).total()": "0",
    'fresh("shop.order"), fresh("shop.invoice")': "(0, 0)",
}
SETUP = """\
import subprocess, sys
def fresh(m):
 return subprocess.run([sys.executable, "-c", f"import {m}"], stderr=subprocess.DEVNULL).returncode
import shop
"""
found = evaluate("/app", SETUP, list(CASES))
finish({case: found[i] == expected for i, (case, expected) in enumerate(CASES.items())})
