"""Conversation with the access points and with people.

- ``reporter`` makes the report and the figures of the slot ads. ``startd_cron`` only prints these figures.
- ``orders_in`` reads orders, ``trust`` verifies them.
- ``control`` answers ``stageout status --node``, ``drain`` ends a pilot.
"""
