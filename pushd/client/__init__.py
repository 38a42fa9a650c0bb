"""pushd.client"""
