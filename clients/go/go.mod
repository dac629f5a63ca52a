module leasehold

go 1.19
