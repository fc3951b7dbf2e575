"""Make the shop's database: the same one every time."""

import sqlite3

names = ["Ana", "Bo", "Cy", "Di", "Ed", "Flo"]
with sqlite3.connect("/app/shop.db") as db:
    db.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT)")
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, cents INTEGER, state TEXT)")
    db.executemany("INSERT INTO customers VALUES (?, ?)", enumerate(names))
    x = 11
    for order in range(200):
        x = x * 48271 % 2147483647
        state = ("paid", "open", "paid", "refunded")[x // 7 % 4]
        db.execute("INSERT INTO orders VALUES (?, ?, ?, ?)", (order, x % 6, x // 100 % 5000, state))
