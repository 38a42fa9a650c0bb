"""What the answers of APNs and FCM mean: tables as data, and the functions that read them."""
