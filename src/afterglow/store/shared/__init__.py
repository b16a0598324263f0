"""The tier that several engines share: an object store, and what finds, brings and publishes extents there."""
