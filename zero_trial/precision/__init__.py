"""Dtypes of training and loss scaling: plain frozen values, no collectives, no state outside them."""
