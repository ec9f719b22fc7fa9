# SPDX-License-Identifier: Apache-2.0
"""Who this run is: its config, its recipe, its environment, its folder."""
