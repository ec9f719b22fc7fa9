# SPDX-License-Identifier: Apache-2.0
"""What the run keeps: manifests, storage, snapshots, retention."""
