# SPDX-License-Identifier: Apache-2.0
"""What the run shows. Fed plain values; knows no other room."""
