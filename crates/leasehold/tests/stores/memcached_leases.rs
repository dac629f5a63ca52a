//! memcached: what is kept, what is lost, and what becomes of those who hold.
