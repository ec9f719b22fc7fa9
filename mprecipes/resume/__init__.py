# SPDX-License-Identifier: Apache-2.0
"""Whether the run may continue, and the proof."""
