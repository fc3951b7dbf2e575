#!/bin/bash
set -euo pipefail
cd /app/shop
sed -i '/^from shop.invoice import Invoice$/d; s/self.count + self.cents/self.count * self.cents/' order.py
sed -i 's/^        return Invoice(\[self\])/        from shop.invoice import Invoice\n\n        return Invoice([self])/' order.py
sed -i 's/return max(/return sum(/' invoice.py
