"""The methods pushd serves: translate, check, call the store, translate back."""
