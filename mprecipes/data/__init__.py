# SPDX-License-Identifier: Apache-2.0
"""What the run reads, and in which order."""
