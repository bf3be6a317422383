"""Rollouts: what one is, many of them as columns, where they come from, and the batches they become.

rollout        one sample, as people hand it over
table          many, as columns: no Python object per token
reading        lists, files and other stacks' columns -> a table (reading_*, dialects)
travelling     a table as an Arrow batch and back, for files and queues
live           engines in this process append
queueing       engines in other processes append, durably
sources        whole groups, rollout batch by rollout batch
rules          what is not trained on, and why
advantages_of  advantages over a whole rollout batch
rounds         a rollout batch cut into minibatches, and dealt (dealing)
assembly       minibatch -> padded or padding-free arrays (placing)
batch          what the trainer gets; views of it in the names of other stacks
engine         all of it, from a position on (positions)
"""
