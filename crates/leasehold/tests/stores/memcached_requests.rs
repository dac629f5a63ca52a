//! memcached: what calls cost, and what becomes of them.
