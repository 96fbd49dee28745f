"""Consensus control: the accuracy of all-reduce for how many bytes?"""
