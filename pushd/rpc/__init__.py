"""pushd.rpc"""
