"""Config of the majority task: predict the most frequent symbol. A minute on two CPU cores, from the project root:

python prepare.py examples/queue_labels/config/train_majority.py
python train.py examples/queue_labels/config/train_majority.py
"""

dataset = "majority"
data_root = "examples/queue_labels/data"
batch_size = 32
block_size = 24  # symbols per row, including padding

symbols = 6  # settings that MajorityProvider declares
lead = 0.3

n_layer = 2
n_head = 2
n_embd = 32
max_iters = 400
eval_interval = 100
learning_rate = 3e-3
