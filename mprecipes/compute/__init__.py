# SPDX-License-Identifier: Apache-2.0
"""How the run computes: processes, precision, numerics, random numbers."""
