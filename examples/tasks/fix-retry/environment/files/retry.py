"""Call again what may fail."""


def retry(function, attempts, on=(Exception,)):
    for _ in range(attempts + 1):
        try:
            return function()
        except Exception:
            pass
    return None
