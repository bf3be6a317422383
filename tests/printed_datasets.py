"""Code blocks of design document 001 about datasets, adapted to the module names of penstock."""

from __future__ import annotations

import textwrap

HOUSE_PRICES = '''
    from typing import Any, Dict  # which the print forgets

    # data/datasets/house_prices.py
    from pathlib import Path
    import pandas as pd
    import mlx.core as mx

    from data.core.base import KaggleDataset, DatasetSpec, CompetitionType
    from data.templates.converters import TabularTextConverter

    class HousePricesDataset(KaggleDataset):
        """House Prices competition dataset."""

        def __init__(self, spec: DatasetSpec, split: str = "train",
                     transform=None, cache_dir=None):
            super().__init__(spec, split, transform, cache_dir)
            self.converter = TabularTextConverter()

        def _load_data(self):
            """Load the dataset."""
            file_path = self.spec.dataset_path / f"{self.split}.csv"
            self._data = pd.read_csv(file_path)

        def _validate_data(self):
            """Validate the loaded data."""
            required_columns = ['Id', 'SalePrice'] if self.split == 'train' else ['Id']
            for col in required_columns:
                if col not in self._data.columns:
                    raise ValueError(f"Missing required column: {col}")

        def __getitem__(self, index: int) -> Dict[str, Any]:
            """Get a single sample."""
            row = self._data.iloc[index]

            # Convert to text
            text = self.converter.convert_row(row)

            # Tokenize (mock for example)
            tokens = self._tokenize(text)

            sample = {
                'text': text,
                'input_ids': mx.array(tokens['input_ids']),
                'attention_mask': mx.array(tokens['attention_mask']),
                'metadata': {'id': row['Id']}
            }

            if self.split == 'train':
                sample['labels'] = mx.array([row['SalePrice']])

            return sample
'''


def penstock_of(block: str, types: str = "penstock.datasets.") -> str:
    """The block with `data.` read as `penstock.`; there is no `core`, its types are in `penstock.datasets`."""
    return textwrap.dedent(block).replace("from data.core.", f"from {types}").replace("from data.", "from penstock.")
