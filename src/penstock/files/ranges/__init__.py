"""Remote files that are read by ranges: in object stores, on web servers, on the Hugging Face Hub."""
