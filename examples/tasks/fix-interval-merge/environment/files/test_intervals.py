import unittest

from intervals import merge


class Merge(unittest.TestCase):
    def test_inside(self):
        self.assertEqual(merge([(1, 10), (2, 3)]), [(1, 10)])

    def test_touching(self):
        self.assertEqual(merge([(1, 2), (2, 3)]), [(1, 3)])
