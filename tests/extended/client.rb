# Ruby's net/http with one connection for each host, by the clients' protocol (see tests/it/py/protocol.py).
require "digest"
require "net/http"

def say(answer)
  puts "#{answer.code} #{answer["retry-after"] || "-"} #{Digest::SHA256.hexdigest(answer.body.to_s)}"
  $stdout.flush
end

verb, *rest = ARGV
urls = (verb == "get" ? rest : rest.first(1)).map { |url| URI(url) }
connections = Hash.new do |kept, key|
  kept[key] = Net::HTTP.start(key[0], key[1], use_ssl: key[2])
end
urls.each do |uri|
  connection = connections[[uri.host, uri.port, uri.scheme == "https"]]
  if verb == "get"
    say(connection.get(uri.request_uri, { "Accept-Encoding" => "identity" }))
  else
    length = rest[1].to_i
    say(connection.post(uri.request_uri, ((0..250).to_a.pack("C*") * (length / 251 + 1))[0, length]))
  end
end
