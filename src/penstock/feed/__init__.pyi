from penstock.feed.remote_loader import RemoteLoader as RemoteLoader
from penstock.feed.replicas import FeedReplicas as FeedReplicas
from penstock.feed.server import FeedServer as FeedServer
from penstock.feed.server import TLSFiles as TLSFiles
