"""Feed service: batches made on other processes or machines than those that train.

    penstock serve CONFIG      makes the batches of a loader file ahead            server.py
    RemoteLoader(address)      hands them to a trainer, as the local loader does   remote_loader.py

Names are imported when they are first used.
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
