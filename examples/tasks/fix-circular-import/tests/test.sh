#!/bin/bash
exec python3 -Es /tests/check.py
