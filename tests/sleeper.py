"""A program that says that it runs, and does so for a minute."""

import time


def main():
    print("here", flush=True)
    time.sleep(60)
