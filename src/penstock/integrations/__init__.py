"""Loaders in trainers, with their state in the trainer's checkpoints. A module for each trainer, which it imports.

transformers    LoaderTrainer, LoaderTrainerMixin, LoaderState
trl             LoaderSFTTrainer, LoaderDPOTrainer, LoaderGRPOTrainer
lightning       LoaderDataModule
accelerate      LoaderFeed
ray_train       LoaderCheckpoint, find_ray_rank
"""
