"""The modelled machine: devices, model shapes, what a pass takes there."""
